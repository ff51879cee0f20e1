"""What serving a model costs: expert caches, prefetching, placement, coverage; `deploy`."""

"""One file a verb: the story of that verb on one page."""

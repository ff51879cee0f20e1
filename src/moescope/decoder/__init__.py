"""The small decoder that the lab trains: model, experts, routers, vocabulary, saving."""

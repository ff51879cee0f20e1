"""Run any model over documents: texts, batches, capture of routing, recorded traces."""

"""intervene: change a router or an expert in memory, and measure what happens."""

"""Between an object store and a host: fetching and mirroring whole checkpoints."""

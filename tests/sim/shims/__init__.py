"""What stands in place of the modules that would reach the machine: threads, clocks, the file system, the network."""

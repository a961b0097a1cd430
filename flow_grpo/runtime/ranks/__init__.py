"""Process groups, watchdog, rendezvous, sample exchange and sharded training."""

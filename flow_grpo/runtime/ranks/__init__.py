"""Process group, watchdog, exchange of samples, sharding."""

"""What a recipe costs, before anything is built; here what help tells of it, which needs no torch."""

# Where nothing is measured: 48 % of the 313 TFLOP/s in bf16 of an Ascend 910B, 40 % of the 376 of the fastest one.
ASSUMED_RATE = 150e12
CORES = 8  # of the host, for each rank

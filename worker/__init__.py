"""halfrate worker: the stages that carry a batch from input file to result files."""

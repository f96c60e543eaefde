"""The `halfrate` console command."""

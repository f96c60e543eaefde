"""halfrate service: API, tables, storage, settings and the command line."""

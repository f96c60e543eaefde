"""Token ids in, results out: the engine, a library that knows no database and no HTTP."""

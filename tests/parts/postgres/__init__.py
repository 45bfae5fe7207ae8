"""Settings and results that several buses share in a Postgres database."""

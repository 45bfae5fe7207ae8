"""Says what both ends of a stream share: records, the session as a state machine, limits, questions, schemas."""

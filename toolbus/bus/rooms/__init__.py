"""The rooms of a bus, each the part with a life of its own around one folder of the bus (`toolbus.bus.core.Room`)."""

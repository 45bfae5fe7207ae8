"""Stands on the path of processes that a plugin spawns: its first import lets them find what their parent does."""

from toolbus.parts.moving.neko.plugin_folder import import_as_parent

import_as_parent(__name__)

"""The structures of generated tasks: a module here offers its tasks as `TASKS`."""

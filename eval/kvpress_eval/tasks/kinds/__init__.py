"""The kinds of tasks: a module here offers its tasks as `KIND`."""

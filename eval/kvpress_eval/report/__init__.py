"""Results for people and programs: pages, plots, tables and files."""

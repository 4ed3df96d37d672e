"""What every other folder may use: errors, files, the modules of a folder."""

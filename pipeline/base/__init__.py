"""Ground that every room stands on: errors and exit codes, files, signals, who this process is."""

"""What the run is, and who said so: options, settings files and launch scripts."""

"""The model that the run trains: out of launch scripts, a Hugging Face config.json, recipes in YAML, and settings."""

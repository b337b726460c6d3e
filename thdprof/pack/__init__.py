"""Makes packs of documents and their order in training, so that graphs are small and the ranks of a step cost alike."""

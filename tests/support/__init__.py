"""What tests share: sample files, strategies, referees."""

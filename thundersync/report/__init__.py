"""What a run leaves for the day after: one HTML page that opens anywhere, and traces for Perfetto."""

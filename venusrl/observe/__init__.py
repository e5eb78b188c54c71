"""What a run says of itself: metrics, records, live progress, plots."""

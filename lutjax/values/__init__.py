"""Values that ops take and return beside plain arrays, and the arithmetic that they share: ids, detections, dtypes, fixed point."""

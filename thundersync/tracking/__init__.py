"""What a run tells trackers of experiments: TensorBoard, Weights & Biases."""

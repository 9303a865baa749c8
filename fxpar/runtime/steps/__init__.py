"""Steps of the pipeline, and what they change."""

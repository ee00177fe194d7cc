"""What users write and read: the custom resource's models, conditions and names."""

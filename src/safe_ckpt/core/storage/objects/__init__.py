"""Object stores: S3, Google Cloud Storage, Azure."""

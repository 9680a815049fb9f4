"""Where bytes live: paths on a file system and in S3, listed and read alike."""

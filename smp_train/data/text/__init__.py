"""Documents of text: found in files, S3 and the Hugging Face hub, read one by one, streamed as tokens."""

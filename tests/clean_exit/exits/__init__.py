"""Programs that leave cleanly or not, and what `clean-exit` has to say about them."""

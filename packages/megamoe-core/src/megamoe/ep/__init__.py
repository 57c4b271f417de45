"""Expert parallelism on the host: who the ranks are, and what they must agree on. The modules load torch on use; this package does not."""

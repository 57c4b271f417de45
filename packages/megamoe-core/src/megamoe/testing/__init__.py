"""How a backend proves itself: the float64 oracle that judges results, the conformance kit, and a launcher for several ranks."""

"""A package, so that ``tests.machine`` and the like are these: where a distribution has installed a package ``tests`` of its own, that
would come before a mere folder."""

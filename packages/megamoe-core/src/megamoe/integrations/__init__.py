"""megamoe inside other people's models and engines; one module each, loaded on use."""

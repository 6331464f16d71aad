"""Three models that `forebay demo` serves and the tests lean on; each folder is one worker, ready to run."""

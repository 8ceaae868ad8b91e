"""From a plan to a hierarchy that runs."""

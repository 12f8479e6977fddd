"""Facts in files: clusters and profiles in TOML, those that come with the package and the user's own."""

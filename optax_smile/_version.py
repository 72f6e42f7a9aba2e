"""The version of the library, which every manifest records."""

__version__ = "0.2.0.dev0"

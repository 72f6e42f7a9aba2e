"""The version of the library, which every manifest records."""

__version__ = "0.1.0"

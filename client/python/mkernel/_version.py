"""The package's version; the build compares it with the library's."""

__version__ = "0.1.0"

"""What pyproject.toml cannot say: a wheel that holds libmkclient is for one platform, and for every Python."""

import pathlib

from setuptools import Distribution, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HAS_LIBRARY = (pathlib.Path(__file__).parent / "mkernel/lib").is_dir()


class PlatformDistribution(Distribution):
    def has_ext_modules(self):
        return HAS_LIBRARY


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(distclass=PlatformDistribution, cmdclass={"bdist_wheel": PlatformWheel})

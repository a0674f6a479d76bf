import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar


class Configurable:
    """What a nested ``Config`` builds; the config knows its owner."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=dataclasses.replace(self), **kwargs)

        def to_dict(self) -> dict[str, Any]:
            return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

        def traverse(self, config_cls: type, *, _prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
            """Each nested config of a class: its name, itself, and where it is held."""
            if isinstance(self, config_cls):
                yield _prefix, self, None, None
                return
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                name = f"{_prefix}.{field.name}" if _prefix else field.name
                listed = isinstance(value, list)
                for index, each in enumerate(value if listed else [value]):
                    if not hasattr(each, "traverse"):
                        continue
                    inner = f"{name}.{index}" if listed else name
                    for found, config, parent, attr in each.traverse(config_cls, _prefix=inner):
                        held = (value, index) if listed else (self, field.name)
                        yield (found, config, *(held if parent is None else (parent, attr)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            cls.Config._owner = cls


def plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value

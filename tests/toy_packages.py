"""Toy packages as installed by pip: a module and its entry points."""

import tomllib


def install(site, project, modules):
    """Installs a package into a folder of `sys.path`.

    Args:
      project: its pyproject.toml, or {group: {name: "module:object"}} of one "mine".
      modules: {name: source}.
    """
    if isinstance(project, str):
        project = tomllib.loads(project)["project"]
    else:
        project = {"name": "mine", "version": "0.1", "entry-points": project}
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    summary = project.get("description")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\n"
        f"Version: {project['version']}\n"
        + (f"Summary: {summary}\n" if summary else "")
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {at}" for name, at in points.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))

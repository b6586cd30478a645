"""What a site's profile puts into a job's environment."""

from __future__ import annotations

from pipeline.config.site import SiteConfig

SETUP_NOT_RUN = "site.setup is not run here: put its lines into the shell or script that this was started from"


def site_variables(site: SiteConfig) -> dict[str, str]:
    """What the site profile puts into a job's environment (NCCL's and Gloo's manuals; tempfile's TMPDIR)."""
    interface = site.network_interface
    named = {} if interface is None else {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    return named if site.scratch is None else {**named, "TMPDIR": str(site.scratch)}

"""Sandboxes in containers of this machine's Docker Engine. Any image works, also one with nothing but a shell.

The engine is asked three things per sandbox: create, start, remove. Everything between goes past it: the static
supervisor is mounted into the container as PID 1 and calls back over a Unix socket in a directory of this sandbox,
mounted read-only. That is as fast as a local sandbox, costs the engine nothing however many commands run, goes on
while the engine restarts (with live-restore), and a broken stream is opened again by the supervisor: same nonce, same
boot id, results kept until acknowledged, a command never run twice. An attached or exec stream of the engine has
none of that; it would only help with an engine on another machine, which is refused.

Threat model: the code in the container is hostile; the engine, the kernel and other processes of the owner are
trusted. Each line with the test that holds it (tests/contracts/test_docker_threats.py unless named otherwise):
- It cannot get rights: no capability, no_new_privs, our system call filter beside the engine's, not root.
  test_sandbox.py::test_every_fault_ends_as_promised ("rights", "mount", "new user namespace")
- It cannot reach a network: no interface but loopback.                ("network", "interfaces" of the same table)
- It cannot read or stop the supervisor, nor learn the nonce.          ("supervisor is closed", "kill 1"), test_nonce_*
- It cannot speak for the supervisor: the socket's directory is read-only inside, the first frame must carry the
  nonce, unproven connections are few and short.                       test_strangers_at_the_socket_are_refused
- It cannot outlive its command's limit: every process carries a group that it may not drop.  (whole fault table)
- It cannot fill the machine: memory, processes, disk and output have limits.                 (whole fault table)
- It cannot change the task's tree or its mounts on the host.          test_layers_and_mounts_are_read_only
- It cannot outlive its owner or its lease: it ends by itself, and is removed by the engine or the reaper.
                                                                       test_sigkill_of_the_owner_*, test_lease_*
- A restarted container cannot pass for the one before: its files are gone.  test_another_boot_id_is_a_lost_sandbox
- Trouble of the engine is SandboxError, never a result.               test_docker_engine_trouble_*
Not covered: a bug of the kernel that is reachable without rights. Another runtime (SandboxSpec.runtime) helps there.
"""

from swe_rl.sandbox.docker.engine import Engine
from swe_rl.sandbox.docker.reap import reap_containers
from swe_rl.sandbox.docker.sandbox import DockerSandbox

__all__ = ["DockerSandbox", "Engine", "reap_containers"]

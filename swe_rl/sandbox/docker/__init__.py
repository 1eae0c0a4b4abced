"""Sandboxes in containers of this machine's Docker Engine. Any image works, also one with nothing but a shell.

The engine is asked three things per sandbox: create, start, remove. Everything between goes past it: the static
supervisor is mounted into the container as PID 1 and calls back over a Unix socket in a directory of this sandbox,
mounted read-only. That is as fast as a local sandbox, costs the engine nothing however many commands run, goes on
while the engine restarts (with live-restore), and a broken stream is opened again by the supervisor: same nonce, same
boot id, results kept until acknowledged, a command never run twice. An attached or exec stream of the engine has
none of that; it would only help with an engine on another machine, which is refused.

Threat model: the code in the container is hostile; the engine, the kernel and other processes of the owner are
trusted. What it tries, what stands in the way, and the test in tests/contracts that shows it:

    gains rights                   no capability, no_new_privs, our system call filter beside the engine's; an ordinary
                                   user, or the image's where that owns the repository
                                   test_every_fault_ends_as_promised, test_an_image_that_brings_its_repository
    reaches a network              no interface but loopback: test_every_fault_ends_as_promised; of hosts only those
                                   listed in SandboxSpec.egress: test_listed_hosts_and_no_others_are_reached
    reads secrets or neighbours    an environment made from nothing, namespaces of its own
                                   test_nothing_of_the_host_is_visible_and_secrets_stay_out,
                                   test_two_sandboxes_do_not_see_each_other
    stops or reads the supervisor  another user's process and PID 1, closed to ptrace and /proc
                                   test_every_fault_ends_as_promised, test_an_image_that_brings_its_repository
    speaks for the supervisor      its socket lies in a read-only mount, the first frame must carry a nonce that no
                                   command can read, unproven connections are few, short, and give us nothing to hold
                                   test_nonce_and_socket_are_closed_to_commands,
                                   test_strangers_at_the_socket_are_refused,
                                   test_strangers_cannot_hand_us_descriptors, test_strangers_cannot_hand_us_memory
    swaps files for links          reads have a command's rights, copies follow no link
                                   test_links_that_change_while_files_are_read,
                                   test_a_fork_follows_no_link_that_changes
    passes an empty container off  another boot id is a lost sandbox: test_another_boot_id_is_a_lost_sandbox
    outlives its command's limit   every process carries a group that it may not drop
                                   test_every_fault_ends_as_promised,
                                   test_timeout_of_one_command_spares_the_others_and_background_jobs
    fills the machine              memory, processes, files, output: test_every_fault_ends_as_promised,
                                   test_disk_on_the_storage_of_the_engine_is_measured,
                                   test_volumes_of_an_image_have_a_size, test_fork_of_a_file_that_is_mostly_holes
    changes the task for others    layers and mounts are read-only: test_layers_and_mounts_are_read_only
    outlives its owner or lease    it ends by itself, and is removed by the engine or the reaper
                                   test_sigkill_of_the_owner_leaves_no_container, test_lease_ends_a_container,
                                   test_reaper_removes_what_the_dead_and_the_late_left
    makes the engine fail          that is SandboxError, never a result: test_docker_engine_trouble_is_typed,
                                   test_engine_restarts_under_a_sandbox

Not covered: a fault of the kernel that is reachable without rights (SandboxSpec.runtime="runsc" puts gVisor before it),
side channels, and what a listed host does with what it is told. What this machine's engine cannot keep exactly is shown
by `swe-rl doctor` (enforcement.py).
"""

from swe_rl.sandbox.docker.engine import Engine
from swe_rl.sandbox.docker.reap import reap_containers
from swe_rl.sandbox.docker.sandbox import DockerSandbox

__all__ = ["DockerSandbox", "Engine", "reap_containers"]

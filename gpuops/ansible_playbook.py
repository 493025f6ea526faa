# SPDX-License-Identifier: GPL-3.0-or-later
"""``ansible-playbook``, started with less looking for garbage.

Python goes again and again through everything that Ansible has just loaded, which is a tenth of the
time of a reset.
"""

import gc
import sys


def main() -> None:
    """As the program of that name."""
    gc.set_threshold(50_000, 20, 20)
    from ansible.cli.playbook import main as ansible_playbook

    sys.argv[0] = "ansible-playbook"
    ansible_playbook()


if __name__ == "__main__":
    main()

import pool_before as pools


def main():
    print("ready:", len(pools.pool.connections), "connections")


main()

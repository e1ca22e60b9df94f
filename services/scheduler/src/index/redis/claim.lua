-- KEYS[1] meta  ARGV[1] owner
-- Gives the mark. HDEL comes first, because a script that has written is not stopped by a full memory.
redis.call('HDEL', KEYS[1], 'cleared')
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
return redis.call('HMGET', KEYS[1], 'offset', 'at')

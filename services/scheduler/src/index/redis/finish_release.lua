-- KEYS[1] meta
-- ARGV[1] field of meta  [2] value
-- Returns 'OK'.
-- A full Redis never refuses HDEL, and refuses no write of a script that has already written.
redis.call('HDEL', KEYS[1], '')
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'OK'}
